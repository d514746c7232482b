# docker build -t raycore:0.1.0 .          for machines without a GPU
# docker build -t raycore:0.1.0-cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
ARG PYTHON_VERSION=3.11
FROM python:${PYTHON_VERSION}-slim

# for KubeRay's own probes and its submitter of jobs
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/*

# the user that Kubernetes manifests for Ray expect
RUN useradd --uid 1000 --create-home --shell /bin/bash ray

# PyTorch first: it is large, and changes less often than the rest
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url ${TORCH_INDEX} "torch>=2.11,<2.14"

ARG RAY_VERSION=2.60.0
COPY pyproject.toml README.md LICENSE /src/
COPY raycore /src/raycore
COPY placement /src/placement
RUN pip install --no-cache-dir "ray==${RAY_VERSION}" "/src[serve,ray-serve]" && rm -rf /src

USER ray
WORKDIR /home/ray
CMD ["raycore", "serve", "--host", "0.0.0.0"]
