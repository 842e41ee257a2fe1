package wire

import (
	"fmt"

	"google.golang.org/protobuf/proto"
)

// Frame says how long a message is as a frame of a ring, and gives the function that appends it to an
// empty slice with room for it.
func Frame(m proto.Message) (size int, fill func(to []byte) ([]byte, error)) {
	return proto.Size(m), func(to []byte) ([]byte, error) {
		return proto.MarshalOptions{UseCachedSize: true}.MarshalAppend(to, m)
	}
}

// FromFrame decodes a frame of a ring, of which m keeps nothing. What it may unfold to need not be
// counted: a frame has 4 KiB. Errors wrap ErrMalformed.
func FromFrame(frame []byte, m proto.Message) error {
	if err := proto.Unmarshal(frame, m); err != nil {
		return fmt.Errorf("frame of %d bytes: %w: %w", len(frame), err, ErrMalformed)
	}
	return nil
}
