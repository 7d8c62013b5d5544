"""The package ``horovod``, made of our modules: ``import spark_hvd.horovod``, and ``import horovod.torch`` finds them.

May import world; what the names stand for is imported when it is asked for. Doors: itself, names, finder.
"""

from spark_hvd.horovod.finder import install

install()
