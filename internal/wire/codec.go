package wire

import (
	"fmt"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that ours wraps
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// What one message may unfold to. Empty sub-messages take two bytes on the wire and a hundred in
// memory: 4 MiB of them become 212 MiB, so they are counted before anything is decoded.
const (
	maxObjects = 1 << 17 // sub-messages, strings and byte slices in lists
	maxNumbers = 1 << 20 // numbers in lists
	maxDepth   = 16      // nesting; our deepest message has 5 levels
)

// Codec is gRPC's protobuf codec with bounded decoding. Both ends of a connection use it.
func Codec() encoding.CodecV2 { return &codec{encoding.GetCodecV2("proto")} }

type codec struct{ encoding.CodecV2 }

// Unmarshal refuses what breaks the bounds before it decodes the message.
func (c *codec) Unmarshal(data mem.BufferSlice, v any) error {
	if m, ok := v.(proto.Message); ok {
		buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
		defer buf.Free()
		if err := CheckSize(buf.ReadOnlyData(), m.ProtoReflect().Descriptor()); err != nil {
			return err
		}
	}
	return c.CodecV2.Unmarshal(data, v)
}

// CheckSize reports whether an encoded message of type d unfolds within the bounds. Errors wrap
// ErrMalformed.
func CheckSize(b []byte, d protoreflect.MessageDescriptor) error {
	return (&sizer{}).message(b, d, 0)
}

type sizer struct{ objects, numbers int }

func (s *sizer) message(b []byte, d protoreflect.MessageDescriptor, depth int) error {
	if depth > maxDepth {
		return malformed("nested deeper than %d", maxDepth)
	}
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return fmt.Errorf("%w: %w", protowire.ParseError(n), ErrMalformed)
		}
		b = b[n:]
		size := protowire.ConsumeFieldValue(number, kind, b)
		if size < 0 {
			return fmt.Errorf("%w: %w", protowire.ParseError(size), ErrMalformed)
		}
		if err := s.field(b[:size], kind, d.Fields().ByNumber(number), depth); err != nil {
			return err
		}
		b = b[size:]
	}
	return nil
}

// field counts one value. f is nil for a field of a newer peer, which is kept as bytes.
func (s *sizer) field(value []byte, kind protowire.Type, f protoreflect.FieldDescriptor, depth int) error {
	if f != nil && f.Message() != nil && kind == protowire.BytesType {
		s.objects++
		inner, _ := protowire.ConsumeBytes(value)
		if err := s.message(inner, f.Message(), depth+1); err != nil {
			return err
		}
	} else {
		s.scalar(value, kind, f)
	}
	if s.objects > maxObjects || s.numbers > maxNumbers {
		return malformed("%d parts and %d numbers, limits %d and %d", s.objects, s.numbers, maxObjects, maxNumbers)
	}
	return nil
}

// scalar counts one value that is no message.
func (s *sizer) scalar(value []byte, kind protowire.Type, f protoreflect.FieldDescriptor) {
	switch {
	case f == nil:
		s.objects++
	case !f.IsList():
	case kind != protowire.BytesType:
		s.numbers++
	case f.Kind() == protoreflect.StringKind || f.Kind() == protoreflect.BytesKind:
		s.objects++
	default: // packed: one byte of each number has no continuation bit
		inner, _ := protowire.ConsumeBytes(value)
		for _, c := range inner {
			if c < 0x80 {
				s.numbers++
			}
		}
	}
}
