"""Which values of a program are of one sample each, and which are sums over a batch's samples.

The first dimension of a batch's tensors counts samples, and this follows it through the program: a
value that no such dimension is left of has been reduced over the batch.  What it then takes part in
is followed for as long as it is linear, with the powers of a batch's size that it grows with.  An
operator that is not known keeps dimensions that stay where they are.
"""
