"""In every Python process below: torchrunx's agent gets muster's `start_processes` for the one name that it imports."""

import sys


class PatchTorchrunx:
    def find_spec(self, name, path=None, target=None):
        if name == "torchrunx.agent":
            sys.meta_path.remove(self)
            import torch.distributed.elastic.multiprocessing as patched

            import muster.elastic

            patched.start_processes = muster.elastic.start_processes
        return None


sys.meta_path.insert(0, PatchTorchrunx())
