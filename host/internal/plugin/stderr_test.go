package plugin

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPlainLines(t *testing.T) {
	long := strings.Repeat("x", 3*logLine)
	for in, want := range map[string]string{
		"":                                 "",
		"hello":                            "hello\n",
		"a\n\nb\r\n":                       "a\n\nb\n",
		`{"@message":"m","@level":"warn"}`: `{"@message":"m","@level":"warn"}` + "\n",
		`{"@message":1}`:                   `plugin: {"@message":1}` + "\n",
		"  {\"@level\" : null}\n[ERROR] e": "plugin:   {\"@level\" : null}\n[ERROR] e\n",
		`{"@message":"m","@message":{}}`:   `plugin: {"@message":"m","@message":{}}` + "\n",
		`{"@timestamp":[]}`:                `plugin: {"@timestamp":[]}` + "\n",
		`{"\u0040message":1}`:              `plugin: {"\u0040message":1}` + "\n",
		`{"@message":1`:                    `{"@message":1` + "\n", // not JSON at all
		`{"other":1}`:                      `{"other":1}` + "\n",
		"null\n[]":                         "null\n[]\n",
		"a\n" + long + "\nb":               "a\n" + long[:2*logLine] + "\nb\n",
		`{"@level":1}` + strings.Repeat(" ", 9e3): `plugin: {"@level":1}` + strings.Repeat(" ", 2*logLine-12) + "\n",
	} {
		for _, r := range []io.Reader{strings.NewReader(in), iotest.OneByteReader(strings.NewReader(in))} {
			got, err := io.ReadAll(newPlainLines(io.NopCloser(r)))
			require.NoError(t, err)
			require.Equal(t, want, string(got), in)
		}
	}
	_, err := io.ReadAll(newPlainLines(io.NopCloser(iotest.ErrReader(io.ErrUnexpectedEOF))))
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

// Whatever comes in, every line that comes out is one that go-plugin can read.
func FuzzPlainLines(f *testing.F) {
	for _, seed := range []string{`{"@message":1}`, "{\"@level\":\n\"x\"}\r", `{"@timestamp":"","@timestamp":3}`, "\t{}"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		lines := bufio.NewScanner(newPlainLines(io.NopCloser(bytes.NewReader(in))))
		for lines.Scan() {
			require.True(t, harmless(lines.Bytes()), "%q", lines.Text())
			require.LessOrEqual(t, len(lines.Bytes()), 2*logLine+len("plugin: "))
			var object map[string]json.RawMessage
			if json.Unmarshal(lines.Bytes(), &object) != nil {
				continue
			}
			for _, key := range []string{"@message", "@level", "@timestamp"} {
				if value, ok := object[key]; ok { // what go-plugin takes for text without asking
					var got any
					require.NoError(t, json.Unmarshal(value, &got))
					require.IsType(t, "", got, "%q", lines.Text())
				}
			}
		}
		require.NoError(t, lines.Err())
	})
}

// What a plugin has written is read, however late; a process that it has left behind is not listened to for ever.
func TestLateReader(t *testing.T) {
	in, out, err := os.Pipe()
	require.NoError(t, err)
	p := &pipe{File: in}
	_, err = out.WriteString("last words")
	require.NoError(t, err)
	require.NoError(t, in.SetReadDeadline(time.Unix(1, 0)))
	b := make([]byte, 4)
	for _, want := range []string{"last", " wor", "ds"} {
		n, err := p.Read(b)
		require.NoError(t, err)
		require.Equal(t, want, string(b[:n]))
	}
	_, err = p.Read(b)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	read := len("last words")
	for err = nil; err == nil; {
		_, failed := out.WriteString("more")
		require.NoError(t, failed)
		var n int
		n, err = p.Read(b)
		read += n
		require.LessOrEqual(t, read, pipeRoom+len(b))
	}
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, out.Close())
	p.late = 0
	rest, err := io.ReadAll(p)
	require.NoError(t, err)
	require.Equal(t, "more", string(rest))
	require.NoError(t, p.Close())
}

func TestLastLine(t *testing.T) {
	for in, want := range map[string]string{
		"":                                 "",
		"a\nb\n\n":                         "b",
		`{"@message":"m","@level":"warn"}`: "m",
		`{"@message":1}`:                   `{"@message":1}`,
		"x\npanic: as told\n\ngoroutine 1": "panic: as told",
	} {
		p := newPlainLines(io.NopCloser(strings.NewReader(in)))
		_, err := io.ReadAll(p)
		require.NoError(t, err)
		require.Equal(t, want, p.lastLine(), in)
	}
}
