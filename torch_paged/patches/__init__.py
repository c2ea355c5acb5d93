"""Reading Hugging Face models: family tables and the seams into transformers."""

if __name__ == "patches":
    raise ImportError("import torch_paged.patches; the top-level link is for readers only")
