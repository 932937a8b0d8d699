"""When a step is slow (trigger, controller) and what it chooses (selector). No model, no loop, no
kernels."""
