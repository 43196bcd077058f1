"""Values that must differ between workers and between starts."""

import hashlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import uuid

found = {
    "random": random.random(),
    "authkey": hashlib.sha256(multiprocessing.current_process().authkey).hexdigest(),
    "tempfile": os.path.basename(tempfile.mktemp()),
    "uuid1": str(uuid.uuid1()),
    "uuid4": str(uuid.uuid4()),
    "urandom": os.urandom(8).hex(),
}
if "torch" in sys.argv:
    import torch

    found |= {"seed": torch.initial_seed(), "torch": torch.rand(1).item()}
if "cuda" in sys.argv:
    found |= {"cuda_seed": torch.cuda.initial_seed(), "cuda": torch.rand(1, device="cuda").item()}
if "numpy" in sys.argv:
    import numpy

    found |= {"numpy": numpy.random.rand()}
print(json.dumps(found))
