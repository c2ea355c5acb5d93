"""`python -m torch_paged check MODEL`: where a model's step first parts from Hugging Face's."""
