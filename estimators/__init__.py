"""Spark ML estimators over the runner: DataFrame in, trained Spark ML model out. None has landed yet."""
