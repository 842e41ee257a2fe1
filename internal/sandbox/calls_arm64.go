package sandbox

import "golang.org/x/sys/unix"

// auditArch is what a filter sees as the architecture of a call.
const auditArch = unix.AUDIT_ARCH_AARCH64

// otherNumbers is beyond every number: there is one set of calls.
const otherNumbers = ^uint32(0)

// legacyCalls are those of neverCalled that only old architectures have.
func legacyCalls() []uint32 { return nil }
