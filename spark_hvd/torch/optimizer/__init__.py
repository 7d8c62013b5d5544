"""DistributedOptimizer: gradients in buckets, reduced during the backward pass.

May import the context, elastic and what is below them; of spark_hvd.torch nothing else. Door: distributed.
"""
