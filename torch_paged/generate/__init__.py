"""The doors: `accelerate()` and what stands behind `model.generate()`."""
