"""The fleet: one file that says which engines exist, a store that has their plans, and what keeps the two true."""
