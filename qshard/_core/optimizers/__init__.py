"""Rules of optimizers that both front ends share: settings of Adam and Muon, and which rank owns a matrix under Muon.

The arithmetic is elsewhere: Adam is an op, and Newton-Schulz is products of each framework.
"""
