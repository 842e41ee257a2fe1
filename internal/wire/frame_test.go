package wire

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

func TestFrame(t *testing.T) {
	want := &kvportv1.SessionRequest{Id: 3, Call: &kvportv1.SessionRequest_Open{Open: OpenToProto(testOpen())}}
	size, fill := Frame(want)
	room := make([]byte, size)
	frame, err := fill(room[:0])
	require.NoError(t, err)
	require.Len(t, frame, size)
	require.Same(t, &room[0], &frame[0], "in place")
	got := new(kvportv1.SessionRequest)
	require.NoError(t, FromFrame(frame, got))
	clear(frame) // the message keeps nothing of it
	require.True(t, proto.Equal(want, got))
	require.ErrorIs(t, FromFrame([]byte{0xff}, got), ErrMalformed)
	_, fill = Frame(&kvportv1.SessionRequest{Call: &kvportv1.SessionRequest_Load{Load: &kvportv1.Transfer{Request: "\xff"}}})
	_, err = fill(nil)
	require.Error(t, err, "no UTF-8")
}
