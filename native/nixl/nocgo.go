//go:build !cgo || !linux || !(amd64 || arm64)

package nixl

import "unsafe"

// In a build without cgo Open always fails, so nothing below is ever called.

type handle = unsafe.Pointer

type library struct{}

func load(path string) (*library, *failure) {
	return nil, binding().NotBuilt(path)
}

func (*library) newAgent(string, Options) (handle, error)            { return nil, ErrUnavailable }
func (*library) freeAgent(handle) error                              { return ErrUnavailable }
func (*library) plugins(handle) ([]string, error)                    { return nil, ErrUnavailable }
func (*library) newBackend(handle, string, []string) (handle, error) { return nil, ErrUnavailable }
func (*library) freeBackend(handle) error                            { return ErrUnavailable }
func (*library) register(_, _ handle, _ Kind, _ []Region) error      { return ErrUnavailable }
func (*library) deregister(_, _ handle, _ Kind, _ []Region) error    { return ErrUnavailable }
func (*library) metadata(handle) ([]byte, error)                     { return nil, ErrUnavailable }
func (*library) addPeer(handle, []byte) (string, error)              { return "", ErrUnavailable }
func (*library) removePeer(handle, string) error                     { return ErrUnavailable }
func (*library) connect(handle, string) error                        { return ErrUnavailable }
func (*library) notify(handle, string, []byte) error                 { return ErrUnavailable }
func (*library) notifications(handle) ([]Notification, error)        { return nil, ErrUnavailable }
func (*library) prepare(handle, *Request) (handle, error)            { return nil, ErrUnavailable }
func (*library) post(_, _ handle) (bool, error)                      { return false, ErrUnavailable }

func (*library) poll(_, _ handle) (bool, error)           { return false, ErrUnavailable }
func (*library) release(_, _ handle) error                { return ErrUnavailable }
func (*library) telemetry(_, _ handle) (Telemetry, error) { return Telemetry{}, ErrUnavailable }

func (*library) list(_, _ handle, _ string, _ Kind, _ []Region) (handle, error) {
	return nil, ErrUnavailable
}
func (*library) freeList(_, _ handle) error                              { return ErrUnavailable }
func (*library) makeTransfer(handle, Op, listed, listed) (handle, error) { return nil, ErrUnavailable }
