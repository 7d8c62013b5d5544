"""DistributedOptimizer: gradients in buckets, reduced while the backward pass goes on.

May import the context, elastic and what is below them; of spark_hvd.torch nothing else. Door: distributed.
"""
