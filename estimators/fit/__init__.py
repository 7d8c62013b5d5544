"""From a DataFrame and parameters to a trained model, for any framework; on the driver.

May import every room below and runner.launch. Doors: estimator, backend.
"""
