# Debian's /etc/profile sets PATH anew; a login shell (KubeRay starts one) must still find the stack.
PATH=/opt/venv/bin:$PATH
export PATH
