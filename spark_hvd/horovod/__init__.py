"""The package ``horovod``, made of our modules: after ``import spark_hvd.horovod``, ``import horovod.torch`` works.

May import world; imports everything else on first use. Doors: itself, names, finder.
"""

from spark_hvd.horovod.finder import install

install()
