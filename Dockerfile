# docker build -t raycore:0.1.0 .          for machines without a GPU
# docker build -t raycore:0.1.0-cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
# docker run --rm --shm-size 2g --publish 8000:8000 raycore:0.1.0 [MODEL] [FLAG]...          (docs/production.md)
ARG PYTHON_VERSION=3.11

# the compiler that the kernels need stays in this stage
FROM python:${PYTHON_VERSION}-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY build_backend /src/build_backend
COPY raycore /src/raycore
COPY placement /src/placement
RUN RAYCORE_CPU_KERNELS=all pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:${PYTHON_VERSION}-slim-bookworm

# KubeRay's default probes, its job submitter and the health check use wget. As the first process, tini reaps those that
# Ray leaves behind
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini wget \
    && rm -rf /var/lib/apt/lists/*

# Kubernetes manifests for Ray expect this user
RUN useradd --uid 1000 --create-home --shell /bin/bash ray

COPY image/constraints.txt /opt/raycore/constraints.txt

# in a layer of its own, because PyTorch is large and changes rarely. Its index has CPU's or CUDA's builds, and PyPI the rest
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --no-deps --index-url ${TORCH_INDEX} --constraint /opt/raycore/constraints.txt torch

# 2.55 to 2.60; a manifest's rayVersion is the same
ARG RAY_VERSION=2.60.0
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /opt/raycore/constraints.txt \
        "ray==${RAY_VERSION}" "$(echo /wheels/raycore-*.whl)[serve,ray-serve]" \
    && rm -rf /wheels

COPY image/entrypoint.sh /opt/raycore/entrypoint.sh

USER ray
WORKDIR /home/ray
EXPOSE 8000
# a server that loads its model answers 503. Kubernetes has probes of its own; `--health-cmd` is for another port or TLS
HEALTHCHECK --start-period=30m --interval=10s --timeout=10s \
    CMD ["wget", "--quiet", "--output-document=/dev/null", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["tini", "--", "/opt/raycore/entrypoint.sh"]
