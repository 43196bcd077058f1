"""Runs a program that calls torch.distributed.run, with that one name replaced: `patched.py MODULE:FUNCTION ARGS ...`."""

import importlib
import sys

import torch.distributed

import muster.run

sys.modules["torch.distributed.run"] = torch.distributed.run = muster.run

module, _, function = sys.argv[1].partition(":")
sys.argv[:] = [module, *sys.argv[2:]]
getattr(importlib.import_module(module), function)()
