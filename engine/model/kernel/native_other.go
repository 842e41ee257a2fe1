//go:build !amd64

package kernel

// native is empty: there is no assembly for this machine yet.
func native() []*isa { return nil }
