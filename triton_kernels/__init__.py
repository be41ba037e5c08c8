"""Triton kernels, one file per operation; installed as magep_fast.triton_kernels."""
