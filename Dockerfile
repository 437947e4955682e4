# Never built by us. docker build -t workbench . && docker run --privileged -v $PWD/runs:/workbench/runs workbench
# The demo's network is emulated in network namespaces, which need --privileged; without it the demo says so, and trains on loopback.
FROM python:3.11-slim-bookworm
RUN apt-get update \
  && apt-get install -y --no-install-recommends build-essential chromium iproute2 \
  && rm -rf /var/lib/apt/lists/*
WORKDIR /workbench
COPY . .
RUN make install
CMD ["make", "demo"]
