# Image with Headway, for one machine or a Ray cluster.
#
#   docker build -t headway .                                 # NVIDIA GPUs: torch brings its CUDA libraries
#   docker build -t headway:cpu --build-arg DEVICE=cpu .
#   docker run --gpus all --shm-size 16g -v "$PWD/runs:/shared" headway train /shared/run.yaml
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

ARG DEVICE=cuda
ARG EXTRAS=train,data,lora,math,ray,sandbox,serve
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Triton compiles with gcc. KubeRay asks for the health of a node by wget, and stops a run by pkill.
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc libc6-dev procps wget \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/headway
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
RUN case "$DEVICE" in \
        cuda) index=https://pypi.org/simple ;; \
        cpu) index=https://download.pytorch.org/whl/cpu ;; \
        *) echo "DEVICE is cuda or cpu, not $DEVICE" >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir --constraint constraints.txt --extra-index-url "$index" ".[$EXTRAS]" 'ray[default]'

RUN useradd --create-home --uid 1000 headway && mkdir /shared && chown headway /shared
USER headway
WORKDIR /shared
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1
# SIGTERM reaches the run itself: it writes a checkpoint and exits with code 75.
STOPSIGNAL SIGTERM
ENTRYPOINT ["headway"]
CMD ["--help"]
