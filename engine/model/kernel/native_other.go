//go:build !amd64

package kernel

// native is nil: there is no assembly for this machine yet.
func native() *isa { return nil }
