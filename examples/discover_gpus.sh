#!/bin/sh
# A discovery script for Spark: the GPUs of this host or container, as Spark wants them told.
#   --conf spark.executor.resource.gpu.discoveryScript=/path/to/discover_gpus.sh
set -e
indices=$(nvidia-smi --query-gpu=index --format=csv,noheader | tr -d ' ' | sed 's/.*/"&"/' | paste -sd, -)
echo "{\"name\": \"gpu\", \"addresses\": [$indices]}"
