"""Shared test set-up: kernels run interpreted where no GPU is present."""

import os

import torch

# Before anything imports triton: without a GPU the launchers run under the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
