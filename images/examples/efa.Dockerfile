# Never built and never run by this project, which has no machine with EFA. An image for the Elastic Fabric Adapter
# (EFA) of AWS: NCCL uses it only through libfabric and the plugin aws-ofi-nccl, both of which AWS's installer
# contains. Download aws-efa-installer-VERSION.tar.gz and check its signature as AWS documents, then:
#   mv aws-efa-installer-VERSION.tar.gz aws-efa-installer.tar.gz
#   DOCKER_BUILDKIT=1 docker build --build-arg BASE=rlhf-stacks:CELL -t rlhf-stacks:mine \
#     -f images/examples/efa.Dockerfile .
# The build fails if the plugin cannot be loaded. The installer replaces Debian's libibverbs by AWS's and needs Debian's
# package index. Run the image with --device /dev/infiniband --ulimit memlock=-1, and check it with `rlhf-stack doctor`.
ARG BASE
# hadolint ignore=DL3006
FROM ${BASE}
USER 0
# No kernel module, no limits and no test with an adapter: these belong to the host.
RUN --mount=type=bind,source=aws-efa-installer.tar.gz,target=/mnt/aws-efa-installer.tar.gz \
    apt-get update && \
    tar --extract --gzip --file /mnt/aws-efa-installer.tar.gz --directory /tmp && \
    env --chdir=/tmp/aws-efa-installer ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify && \
    rm -rf /tmp/aws-efa-installer /var/lib/apt/lists/* && \
    find /opt/amazon -name libnccl-net-ofi.so -printf '%h\n' > /etc/ld.so.conf.d/aws-ofi-nccl.conf && \
    ldconfig && \
    python -c "import ctypes; ctypes.CDLL('libnccl-net-ofi.so')"
ENV NCCL_NET_PLUGIN=ofi
USER 1000
