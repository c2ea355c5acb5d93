"""CUDA graphs: batch buckets, static inputs, capture and replay. Knows shapes, not models."""

if __name__ == "graphs":
    raise ImportError(
        "the folder graphs is torch_paged.graphs under another path; "
        "import torch_paged.graphs instead"
    )
