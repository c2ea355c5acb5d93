"""GPU ops of torch_paged: tensors in, tensors out; torch and Triton are all they need.

Each op is one file: its equation, a plain-torch reference that is also the CPU kernel, a Triton
kernel, its launcher, its registration under ``torch.ops.torch_paged`` and a typed public function.
Import an op from its file, e.g. ``from torch_paged.ops.rms_norm import rms_norm``; importing this
package registers nothing, so it stays cheap and never touches a GPU.
"""

if __name__ == "ops":
    raise ImportError(
        "the folder ops is torch_paged.ops under another path; import torch_paged.ops instead"
    )
