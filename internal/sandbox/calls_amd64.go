package sandbox

import "golang.org/x/sys/unix"

// auditArch is what a filter sees as the architecture of a call.
const auditArch = unix.AUDIT_ARCH_X86_64

// otherNumbers is the first number of the x32 calls, which are these calls by other numbers.
const otherNumbers = 0x40000000

// legacyCalls are those of neverCalled that only old architectures have.
func legacyCalls() []uint32 {
	return []uint32{
		unix.SYS_CHMOD, unix.SYS_CHOWN, unix.SYS_LCHOWN, unix.SYS_UTIME, unix.SYS_UTIMES, unix.SYS_FUTIMESAT,
		unix.SYS_IOPL, unix.SYS_IOPERM, unix.SYS_MODIFY_LDT, unix.SYS_USELIB,
	}
}
