//go:build !cgo || !linux || !(amd64 || arm64)

package cuda

// In a build without cgo Open always fails, so nothing below is ever called.

type library struct{}

func load(path string) (*library, *failure) {
	return nil, binding().NotBuilt(path)
}

func (*library) version() (int, error)                { return 0, ErrUnavailable }
func (*library) devices() (int, error)                { return 0, ErrUnavailable }
func (*library) malloc(_, _ int) (Pointer, error)     { return nil, ErrUnavailable }
func (*library) free(int, Pointer) error              { return ErrUnavailable }
func (*library) copyIn(int, Pointer, []byte) error    { return ErrUnavailable }
func (*library) copyOut(int, []byte, Pointer) error   { return ErrUnavailable }
func (*library) export(int, Pointer) (Handle, error)  { return Handle{}, ErrUnavailable }
func (*library) imports(int, Handle) (Pointer, error) { return nil, ErrUnavailable }
func (*library) unimport(int, Pointer) error          { return ErrUnavailable }
func (*library) stream(int) (Stream, error)           { return nil, ErrUnavailable }
func (*library) freeStream(Stream) error              { return ErrUnavailable }
func (*library) wait(Stream) error                    { return ErrUnavailable }
