# Debian's /etc/profile sets PATH anew; a login shell (KubeRay starts one, in place of the entrypoint) must still
# find the stack, its environment and the profile that was asked for.
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
