"""What a job needs before it runs: memory, traffic and time on each GPU, from formulas; nothing here imports torch."""
