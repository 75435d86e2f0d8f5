"""Optimizers: Adam with states in few bits, and master weights that are cast to quantized weights."""
