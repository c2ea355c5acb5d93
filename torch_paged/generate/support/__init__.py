"""`python -m torch_paged support`: every causal-LM type, built tiny, run and compared."""
