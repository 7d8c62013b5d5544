"""Mistakes that newcomers make, as a table: what they type, and what the message must name.

A message is good if it names the wrong value (or what failed), the place (the argument, the column, or the line
of the user's code) and the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

DATA = """
import numpy as np, torch, spark_hvd
from pyspark.sql import functions as F
from spark_hvd.estimators import Store, TorchEstimator, TorchModel
rows = spark.range(64).select(F.col("id").cast("float").alias("x"), (F.col("id") * 2.0).cast("float").alias("y"))
def fit(df=rows, model=None, **given):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1)) if model is None else model
    usual = dict(model=model, optimizer=lambda params: torch.optim.SGD(params, lr=1e-5), loss=torch.nn.MSELoss(),
                 feature_cols=["x"], label_cols=["y"], input_shapes=[[-1, 1]], label_shapes=[[-1, 1]], num_proc=2,
                 batch_size=16, epochs=1, verbose=0)
    return TorchEstimator(**{**usual, **given}).fit(df)
def run(fn, *args, **given):
    return spark_hvd.run(fn, args, **{"num_proc": 2, "verbose": 0, **given})
"""
"""Lines that come before each of them."""
NEVER = (
    "memory://",
    "py4j",
    "org.apache.spark",
    "'NoneType' object",
    "GLHF",
    "/__w/",
    "\nRuntimeError: the connection",
)
"""Words of Spark's Java, Python's None, Gloo's sources and our own frames, from which a newcomer learns nothing."""


@dataclass(frozen=True)
class Mistake:
    """A mistake.

    Attributes:
        code: What the user types.
        value: What is wrong, as in the message.
        place: Where it is wrong: an argument, a column, or text in the line of code.
        step: What helps.
        fails: Whether it raises; otherwise a warning is printed, and the run continues.
    """

    code: str
    value: str
    place: str
    step: str
    fails: bool = True

    @property
    def shakes(self) -> bool:
        """Whether it reaches ranks, or ends the session: a later job shows whether the next one runs."""
        return any(part in self.code for part in ("def fn", ".fit(", "spark.stop()"))


def in_rank(body: str, call: str = "run(fn)") -> str:
    """Return a function for ranks, and the call that runs it."""
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    return f"def fn():\n    import os, sys, time, torch, spark_hvd.torch as hvd\n{lines}{call}"


def training(before: str, steps: str = "2", backward: str = "model(torch.ones(4, 2)).sum().backward()") -> str:
    """Return training with DistributedOptimizer, after the lines `before`."""
    return in_rank(
        f"""model = torch.nn.Linear(2, 1)
{before}
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range({steps}):
    optimizer.zero_grad()
    {backward}
    optimizer.step()""",
        "run(fn, verbose=1)",
    )


BROADCAST = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"

MISTAKES = {
    # -- an estimator and its data
    "a column that is not there": Mistake('fit(feature_cols=["xx"])', "'xx'", "feature_cols", "Did you mean 'x'"),
    "no label of that name": Mistake('fit(label_cols=["z"])', "'z'", "label_cols", "It has"),
    "a misspelt parameter": Mistake("fit(batchsize=8)", "batchsize", "no parameter", "Did you mean 'batch_size'"),
    "a number as text": Mistake("fit(epochs='3')", "epochs='3'", "epochs", "expected a whole number"),
    "a number for columns": Mistake("fit(feature_cols=3)", "feature_cols=3", "feature_cols", "expected"),
    "no rows in a batch": Mistake("fit(batch_size=0)", "batch_size=0", "batch_size", "at least 1"),
    "the class of the model": Mistake("fit(model=torch.nn.Linear)", "Linear", "model", "expected a torch.nn.Module"),
    "the optimizer of another model": Mistake(
        "fit(optimizer=torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))",
        "2 of its parameters",
        "optimizer",
        "model.parameters()",
    ),
    "the optimizer's name": Mistake("fit(optimizer='adam')", "'adam'", "optimizer", "expected"),
    "a function for a callback": Mistake("fit(callbacks=[print])", "print", "callbacks", "a subclass of Callback"),
    "no loss": Mistake("fit(loss=None)", "loss is missing", "loss", "torch.nn.MSELoss()"),
    "the class of the loss": Mistake("fit(loss=torch.nn.MSELoss)", "MSELoss'", "loss=", "torch.nn.MSELoss()"),
    "the loss's name": Mistake("fit(loss='mse')", "'mse'", "loss=", "torch.nn.MSELoss()"),
    "a loss of each row": Mistake(
        "fit(loss=torch.nn.MSELoss(reduction='none'))", "float32 [32, 1]", "the loss of a batch", "single number"
    ),
    "a frozen model": Mistake(
        "fit(model=torch.nn.Linear(1, 1).requires_grad_(False))", "loss", "on any trained parameter", "no_grad"
    ),
    "a model of another input": Mistake(
        "fit(model=torch.nn.Linear(3, 1))", "x: float32 [32, 1]", "model(*inputs)", "input_shapes="
    ),
    "two outputs for a label": Mistake(
        """
class Two(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x), super().forward(x)
fit(model=Two(1, 1))
""",
        "2 outputs",
        "outputs",
        "expected",
    ),
    "text as a feature": Mistake('fit(rows.withColumn("x", F.lit("red")))', "string", "'x'", "StringIndexer"),
    "lists of different lengths": Mistake(
        """
df = spark.createDataFrame([([1.0, 2.0], 1.0), ([1.0], 2.0)] * 8, "x array<float>, y float")
fit(df, model=torch.nn.Linear(2, 1), input_shapes=None)
""",
        "lengths",
        "'x'",
        "ad or cut",
    ),
    "lists of another length later on": Mistake(
        """
lists = F.expr("if(id < 150, array(1f, 2f), array(1f))")
fit(spark.range(200).select(lists.alias("x"), F.lit(1.0).alias("y")), torch.nn.Linear(2, 1), input_shapes=None)
""",
        "of length",
        "'x'",
        "ad or cut",
    ),
    "a label that is null": Mistake(
        'fit(rows.withColumn("y", F.expr("if(x = 40, null, y)")))', "1 null", "'y'", "na.drop"
    ),
    "a feature that is NaN": Mistake(
        """fit(rows.withColumn("x", F.expr("if(x = 40, float('nan'), x)")))""", "NaN", "'x'", "na.fill"
    ),
    "an embedding of a double": Mistake(
        """
numbers = rows.withColumn("x", F.col("x").cast("double"))
fit(numbers, torch.nn.Sequential(torch.nn.Embedding(64, 1), torch.nn.Flatten()))
""",
        "x: float",
        "model(*inputs)",
        "input_dtypes=['int64']",
    ),
    "a pandas frame": Mistake("fit(rows.toPandas())", "pandas", "fit", "createDataFrame"),
    "a stream": Mistake(
        """
stream = spark.readStream.format("rate").load()
fit(stream.select(F.col("value").cast("float").alias("x"), F.col("value").cast("float").alias("y")))
""",
        "streaming DataFrame",
        "fit got",
        "spark.read",
    ),
    "transform before fit": Mistake(
        "TorchEstimator(model=torch.nn.Linear(1, 1)).transform(rows)", "not trained", "TorchEstimator", ".fit(df)"
    ),
    "no rows": Mistake('fit(rows.where("x < 0"))', "no rows", "DataFrame", "filters"),
    "fewer rows than ranks": Mistake("fit(rows.limit(1))", "1 row ", "num_proc=2", "fewer ranks"),
    "a share above one": Mistake("fit(validation=1.5)", "validation=1.5", "validation", "expected a share"),
    "no column to validate by": Mistake("fit(validation='held')", "'held'", "validation", "It has"),
    "a store that is a number": Mistake("fit(store=3)", "store=3", "store", "path or URL"),
    "a store of an unknown kind": Mistake("fit(store='nowhere://b')", "nowhere", "nowhere://b", "nstall"),
    "more ranks than slots in a fit": Mistake("fit(num_proc=5)", "5 slots", "local[2]", "local[5]"),
    "rows of another size in transform": Mistake(
        """
pairs = spark.range(32).select(F.array(F.lit(1.0), F.lit(2.0)).alias("x"), F.lit(1.0).alias("y"))
model = fit(pairs, torch.nn.Linear(2, 1), input_shapes=None)
model.transform(spark.range(3).select(F.array(F.lit(1.0)).alias("x"))).collect()
""",
        "(1,)",
        "'x'",
        "expected (2,)",
    ),
    "transform without the column": Mistake(
        "fit().transform(spark.range(3)).collect()", "'x'", "feature_columns", "It has"
    ),
    # -- a run and its arguments
    "more ranks than slots": Mistake("run(print, num_proc=5)", "5 slots", "local[2]", "local[5]"),
    "no ranks": Mistake("run(print, num_proc=0)", "num_proc=0", "num_proc", "at least 1"),
    "a misspelt argument": Mistake(
        "spark_hvd.run(print, num_procs=2)", "'num_procs'", "run()", "Did you mean 'num_proc'"
    ),
    "a number for a tuple": Mistake("spark_hvd.run(print, args=5, num_proc=2)", "args=5", "args", "args=(5,)"),
    "text for a tuple": Mistake("spark_hvd.run(print, args=('abc'), num_proc=2)", "'abc'", "args", "('abc',)"),
    "arguments that do not fit": Mistake("run(lambda a, b: a, 1)", "'b'", "missing", "args"),
    "the function called": Mistake(
        in_rank("return hvd.rank()", "run(fn())"), "has not been initialized", "hvd.rank()", "run(fn"
    ),
    "another backend": Mistake("run(print, backend='gluu')", "backend='gluu'", "backend", "'gloo'"),
    "a negative time": Mistake("run(print, timeout=-1)", "timeout=-1", "timeout", "above 0"),
    "a variable that is no text": Mistake("run(print, env={'A': 1})", "env['A']=1", "env", "expected text"),
    "ports that are none": Mistake(
        "run(print, network=spark_hvd.Network(ports='many'))", "many", "ports", "30000-30100"
    ),
    "an interface that is not there": Mistake(
        "run(print, network=spark_hvd.Network(interfaces=['eth99']))", "eth99", "interface", "Give names or networks"
    ),
    "enough ranks without restarts": Mistake(
        "run(print, min_num_proc=1)", "min_num_proc=1", "max_restarts=0", "give max_restarts"
    ),
    "a session in the function": Mistake(
        in_rank("return spark.range(3).count()"), "SparkSession", "'spark'", "estimator"
    ),
    "the context in the function": Mistake(
        "sc = spark.sparkContext\n" + in_rank("return sc.parallelize([1])"), "SparkContext", "'sc'", "estimator"
    ),
    "a DataFrame as an argument": Mistake("run(lambda df: df.count(), rows)", "DataFrame", "args[0]", "toPandas"),
    "a lock in the function": Mistake(
        "import threading\nlock = threading.Lock()\n" + in_rank("return lock"), "lock", "'lock'", "inside fn"
    ),
    "an async function": Mistake(
        """
async def fn(): return 1
run(fn)
""",
        "is async",
        "fn=fn",
        "asyncio.run",
    ),
    "class numbers in a column of their own": Mistake(
        """
classes = rows.withColumn("y", F.array((F.col("x") % 2).cast("long")))
fit(classes, torch.nn.Linear(1, 2), loss=torch.nn.CrossEntropyLoss(), label_shapes=None)
""",
        "y: int64 [32, 1]",
        "the loss",
        "label_shapes=[[-1]]",
    ),
    # -- what goes wrong in a rank
    "a run in a run": Mistake(
        in_rank("import spark_hvd\nspark_hvd.run(print, num_proc=2)"),
        "ranks have no Spark",
        "spark_hvd.run(print",
        "call run",
    ),
    "an error of one rank": Mistake(
        in_rank("if hvd.rank() == 1: raise ValueError('bad batch')"), "bad batch", "raise ValueError", "rank 1"
    ),
    "a module that is not there": Mistake(in_rank("import mymodule"), "mymodule", "import mymodule", "PYTHONPATH"),
    "a value that cannot be pickled": Mistake(
        in_rank("import threading\nreturn threading.Lock()"), "lock", "returned", "return"
    ),
    "sys.exit(3)": Mistake(in_rank("sys.exit(3)"), "sys.exit(3)", "sys.exit(3)", "instead of returning"),
    "sys.exit(0)": Mistake(in_rank("sys.exit(0)"), "sys.exit(0)", "sys.exit(0)", "instead of returning"),
    "os._exit(7)": Mistake(in_rank("os._exit(7)"), "7", "rank", "os._exit"),
    "a crash": Mistake(in_rank("import ctypes\nctypes.string_at(0)"), "SIGSEGV", "line 4 in fn", "versions"),
    "a loop without end": Mistake(
        in_rank("x = 0\nwhile True: x += 1", "run(fn, timeout=8)"), "timeout=8", "while True: x += 1", "larger timeout"
    ),
    "weights that differ at the start": Mistake(
        training("torch.nn.init.constant_(model.weight, hvd.rank())"),
        "'weight'",
        "py:8: UserWarning",
        "broadcast_parameters",
        fails=False,
    ),
    "DDP and DistributedOptimizer": Mistake(
        training("model = torch.nn.parallel.DistributedDataParallel(model)"),
        "by DistributedDataParallel and by DistributedOptimizer",
        "py:8: UserWarning",
        "use only one",
        fails=False,
    ),
    "more steps on one rank": Mistake(
        training(BROADCAST, steps="2 + hvd.rank()"), "rank 0 had already returned", "backward()", "hvd.join()"
    ),
    "a rank that returns early": Mistake(
        in_rank("if hvd.rank() == 0: return\nhvd.allreduce(torch.ones(1), name='a')"),
        "rank 0 had already returned",
        "hvd.allreduce(torch.ones(1), name='a')",
        "hvd.join()",
    ),
    "the class of the optimizer": Mistake(
        in_rank("hvd.DistributedOptimizer(torch.optim.SGD)"), "SGD", "optimizer=", "SGD(model.parameters()"
    ),
    "the model for its parameters' names": Mistake(
        in_rank("m = torch.nn.Linear(2, 1)\nhvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m)"),
        "named_parameters must",
        "hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.1), m)",
        "pass model.named_parameters()",
    ),
    "tensors of different shapes": Mistake(
        in_rank("hvd.allreduce(torch.ones(1 + hvd.rank()), name='a')"), "'a'", "hvd.allreduce", "shape"
    ),
    "backward twice": Mistake(
        training(BROADCAST, backward="for _ in range(2): model(torch.ones(4, 2)).sum().backward()"),
        "twice",
        "backward()",
        "backward_passes_per_step",
    ),
    "a process group once more": Mistake(
        in_rank("torch.distributed.init_process_group('gloo')"),
        "process group twice",
        "init_process_group('gloo')",
        "leave init_process_group out",
    ),
    "a GPU that is not there": Mistake(
        in_rank("return torch.ones(1).cuda()", "run(fn, gpus_per_proc=0)"), "CUDA", ".cuda()", "gpus_per_proc=1"
    ),
    "a number of numpy's in a checkpoint": Mistake(
        in_rank(
            """import numpy, tempfile
from spark_hvd import checkpoint
checkpoint.save(tempfile.mkdtemp(), {'best': numpy.float64(0.5)}, step=1)"""
        ),
        "numpy.float64",
        "state['best']",
        ".item()",
    ),
    # -- elastic runs
    "an elastic run of a function that fails": Mistake(
        in_rank("raise ValueError('bad batch')", "spark_hvd.run_elastic(fn, num_proc=2, min_num_proc=1, verbose=0)"),
        "failed on host localhost: ValueError: bad batch",
        "raise ValueError",
        "min_num_proc=1",
    ),
    "fewer at most than at least": Mistake(
        "spark_hvd.run_elastic(print, num_proc=2, min_num_proc=3, max_num_proc=2)",
        "min_num_proc=3",
        "max_num_proc",
        "expected",
    ),
    # -- a session that has ended: the last, as the others need one
    "a fit after spark.stop()": Mistake("spark.stop()\nfit()", "stopped", "session", "SparkSession.builder"),
}
