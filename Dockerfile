# thinwire in a container; everything it keeps is under /training, which you mount.
#
#   docker build -t thinwire .
#   docker build -t thinwire --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
#
# The first image computes on CPUs, the second on NVIDIA GPUs (docker run --gpus all ...).
FROM python:3.12-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=hf,data,plots

WORKDIR /opt/thinwire
COPY pyproject.toml MANIFEST.in constraints.txt README.md LICENSE ./
COPY src ./src
# Of two wheels of one version pip takes the one with a label (2.13.0+cpu), so TORCH_INDEX decides.
RUN pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt \
        --extra-index-url "${TORCH_INDEX}" ".[${EXTRAS}]" \
    && useradd --create-home --uid 1000 thinwire \
    && install --directory --owner thinwire /training

ENV THINWIRE_CACHE=/training/.thinwire/cache \
    THINWIRE_DATA=/training/.thinwire/data \
    HF_HOME=/training/.thinwire/huggingface
USER 1000
WORKDIR /training
ENTRYPOINT ["thinwire"]
CMD ["--help"]
