//go:build !cgo || !linux || !(amd64 || arm64)

package nccl

import "unsafe"

// In a build without cgo Open always fails, so nothing below is ever called.

type library struct{}

func load(path string) (*library, *failure) {
	return nil, binding().NotBuilt(path)
}

func (*library) version() (int, error)                     { return 0, ErrUnavailable }
func (*library) newID() (ID, error)                        { return ID{}, ErrUnavailable }
func (*library) join(ID, int, int) (unsafe.Pointer, error) { return nil, ErrUnavailable }
func (*library) group(bool) error                          { return ErrUnavailable }
func (*library) state(unsafe.Pointer) error                { return ErrUnavailable }
func (*library) leave(unsafe.Pointer, bool) error          { return ErrUnavailable }

func (*library) send(_, _ unsafe.Pointer, _, _ int, _ unsafe.Pointer) error { return ErrUnavailable }

func (*library) receive(_, _ unsafe.Pointer, _, _ int, _ unsafe.Pointer) error {
	return ErrUnavailable
}
