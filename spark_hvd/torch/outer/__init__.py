"""LocalSGD and DiLoCo: ranks train alone for some steps, then an outer step brings them together.

May import torch.optimizer, the context, elastic and what is below them; of spark_hvd.torch nothing else. Doors:
local_sgd, compressors.
"""
