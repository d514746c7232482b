# docker build -t raycore:0.1.0 .          for machines without a GPU
# docker build -t raycore:0.1.0-cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
ARG PYTHON_VERSION=3.11
FROM python:${PYTHON_VERSION}-slim

# KubeRay's default probes and its job submitter use wget; g++ compiles the kernels
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/*

# Kubernetes manifests for Ray expect this user
RUN useradd --uid 1000 --create-home --shell /bin/bash ray

# in a layer of its own, because PyTorch is large and changes rarely
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url ${TORCH_INDEX} "torch>=2.11,<2.14"

# 2.55 to 2.60; a manifest's rayVersion is the same
ARG RAY_VERSION=2.60.0
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY build_backend /src/build_backend
COPY raycore /src/raycore
COPY placement /src/placement
RUN pip install --no-cache-dir "ray==${RAY_VERSION}" "/src[serve,ray-serve]" && rm -rf /src

USER ray
WORKDIR /home/ray
CMD ["raycore", "serve", "--host", "0.0.0.0"]
