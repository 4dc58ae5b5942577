"""A fixed ladder of tests of this image on a user's own machines, whose result is a certificate.

May import every package except ``cli`` and ``hooks``. `model`, `attention`, `device_memory`, `streams`,
`memory_peaks`, `ipc` and what runs them need no package of the image but torch, so that they also run where
only torch is installed (``python -m scripts gpu-kit``).
"""
