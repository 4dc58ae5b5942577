# Debian's /etc/profile resets PATH. A login shell, which KubeRay before 1.4 starts instead of the entrypoint, still
# needs the stack, its environment and the profile in RLHF_STACK_PROFILE.
PATH=/opt/venv/bin:$PATH
export PATH
if rlhf_stack_exports=$(/usr/local/lib/rlhf-stack/environment); then
    eval "$rlhf_stack_exports"
    unset rlhf_stack_exports
else
    case $- in
    *i*) unset rlhf_stack_exports ;;
    *) exit 2 ;;
    esac
fi
