//go:build !cgo || !linux || !(amd64 || arm64)

package ucx

import "unsafe"

// In a build without cgo Open always fails, so nothing below is ever called.

type handle = unsafe.Pointer

type library struct{}

func load(path string) (*library, *failure) {
	return nil, binding().NotBuilt(path)
}

func (*library) version() string                              { return "" }
func (*library) newWorker(Options) (_, _ handle, _ error)     { return nil, nil, ErrUnavailable }
func (*library) freeWorker(_, _ handle)                       {}
func (*library) address(handle) ([]byte, error)               { return nil, ErrUnavailable }
func (*library) progress(handle) bool                         { return false }
func (*library) fd(handle) (int, error)                       { return 0, ErrUnavailable }
func (*library) arm(handle) (bool, error)                     { return false, ErrUnavailable }
func (*library) mapMemory(handle, []byte) (handle, error)     { return nil, ErrUnavailable }
func (*library) unmap(_, _ handle) error                      { return ErrUnavailable }
func (*library) pack(_, _ handle) ([]byte, error)             { return nil, ErrUnavailable }
func (*library) unpack(handle, []byte) (handle, error)        { return nil, ErrUnavailable }
func (*library) freeKey(handle)                               {}
func (*library) connect(handle, []byte, bool) (handle, error) { return nil, ErrUnavailable }
func (*library) closeEndpoint(handle, bool) (handle, error)   { return nil, ErrUnavailable }
func (*library) flush(handle) (handle, error)                 { return nil, ErrUnavailable }
func (*library) move(handle, *movement) (handle, error)       { return nil, ErrUnavailable }
func (*library) send(handle, []byte, uint64) (handle, error)  { return nil, ErrUnavailable }
func (*library) receive(_ handle, _ []byte, _, _ uint64) (handle, error) {
	return nil, ErrUnavailable
}

func (*library) poll(_, _ handle, _ bool) (bool, received, error) {
	return true, received{}, ErrUnavailable
}
func (*library) cancel(_, _ handle) {}
