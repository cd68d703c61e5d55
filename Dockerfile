# One image for every kind of cluster: docker build --target cpu -t airmoe-ray:0.3.0-cpu .   (or cuda)
# PyPI's torch for Linux is a CUDA build; for a small CPU image give PyTorch's index of CPU wheels, as its own installation
# page names it: --build-arg PIP_EXTRA_INDEX_URL=…

FROM python:3.11-slim AS wheel
COPY pyproject.toml README.md LICENSE /src/
COPY airmoe_ray /src/airmoe_ray
COPY actors /src/actors
COPY api /src/api
COPY configs /src/configs
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist /src

# rsync, ssh and ps are called by `ray up`, wget by KubeRay's health checks
FROM python:3.11-slim AS base
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends hostname openssh-client procps rsync wget \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 --shell /bin/bash airmoe
COPY constraints.txt /dist/

FROM base AS cpu
ARG PIP_EXTRA_INDEX_URL
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --constraint /dist/constraints.txt torch torchvision
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --constraint /dist/constraints.txt /dist/*.whl
USER 1000
WORKDIR /home/airmoe
EXPOSE 8000
CMD ["airmoe", "--help"]

FROM base AS cuda
# what the NVIDIA runtime of the host brings into the container
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --constraint /dist/constraints.txt torch torchvision
COPY --from=wheel /dist /dist
RUN pip install --no-cache-dir --constraint /dist/constraints.txt /dist/*.whl
USER 1000
WORKDIR /home/airmoe
EXPOSE 8000
CMD ["airmoe", "--help"]
