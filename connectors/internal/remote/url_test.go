package remote

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPrivate(t *testing.T) {
	for address, ok := range map[string]bool{
		"127.0.0.1:1": true, "[::1]:1": true, "localhost:1": true, "127.9.9.9:1": true,
		"10.0.0.1:1": false, "redis.example:1": false, "0.0.0.0:1": false, "[2001:db8::1]:1": false,
	} {
		o := Options{Network: "tcp", Addresses: []string{address}}
		if ok {
			require.NoError(t, o.Private(), address)
			continue
		}
		require.ErrorIs(t, o.Private(), ErrPlain, address)
	}
	require.ErrorContains(t, (&Options{Network: "tcp", Addresses: []string{"127.0.0.1"}}).Private(), "missing port")
	require.NoError(t, (&Options{Network: "unix", Addresses: []string{"/x"}}).Private())
}

func TestParseURL(t *testing.T) {
	for text, want := range map[string]string{
		"redis://h":                      "tcp [h:6379] 0 cluster=false tls=false",
		"redis://h:1/3":                  "tcp [h:1] 3 cluster=false tls=false",
		"valkeys://[::1]:1/":             "tcp [[::1]:1] 0 cluster=false tls=true",
		"rediss://h":                     "tcp [h:6379] 0 cluster=false tls=true",
		"redis-cluster://a:1,b:2":        "tcp [a:1 b:2] 0 cluster=true tls=false",
		"rediss-cluster://a:1,b:2/0":     "tcp [a:1 b:2] 0 cluster=true tls=true",
		"unix:///run/x.sock":             "unix [/run/x.sock] 0 cluster=false tls=false",
		"redis://user:hunter2@h:1":       "error: has a user or a password in it; they have fields of their own",
		"h:1":                            "error: is no URL, want such as redis://127.0.0.1:6379",
		"http://h":                       `error: has the scheme "http", want redis, rediss, redis-cluster, rediss-cluster or unix`,
		"redis://":                       "error: has no host that could be read, want such as redis://127.0.0.1:6379",
		"redis://]":                      "error: has no host that could be read, want such as redis://127.0.0.1:6379",
		"redis://h:99999":                `error: has the port "99999", want 1..65535`,
		"redis://a:1,b:2":                "error: names 2 servers; for a cluster write redis-cluster://",
		"redis://h/x":                    "error: does not end with the number of a database (a cluster has only 0)",
		"redis-cluster://h:1/1":          "error: does not end with the number of a database (a cluster has only 0)",
		"unix://x":                       "error: names no absolute path, want such as unix:///run/redis.sock",
		"redis://h?protocol=3&password=": "error: has no host that could be read, want such as redis://127.0.0.1:6379",
	} {
		o, err := ParseURL(text)
		got := fmt.Sprintf("%s %v %d cluster=%v tls=%v", o.Network, o.Addresses, o.DB, o.Cluster, o.TLS != nil)
		if err != nil {
			got = "error: " + err.Error()
		}
		require.Equal(t, want, got, text)
	}
}

func FuzzParseURL(f *testing.F) {
	f.Add("redis://h:1/0")
	f.Add("redis-cluster://a:1,b:2")
	f.Add("unix:///x")
	f.Fuzz(func(t *testing.T, text string) {
		o, err := ParseURL(text)
		if err != nil {
			return
		}
		require.NotEmpty(t, o.Addresses)
		for _, a := range o.Addresses {
			if o.Network == "tcp" {
				_, _, err := net.SplitHostPort(a)
				require.NoError(t, err)
			}
		}
	})
}

// FuzzReply feeds any reply to the receiver of a value: it takes the block or says why not, and reads to the
// end of what was announced.
func FuzzReply(f *testing.F) {
	it := item(1, 10, 5)
	f.Add([]byte("$63"), appendValue(nil, it))
	f.Add([]byte("$-1"), []byte{})
	f.Add([]byte("-ERR no"), []byte{})
	f.Add([]byte("$99999999999999999999"), []byte("x"))
	f.Fuzz(func(t *testing.T, line, value []byte) {
		got := blank(it)
		r := newScatter(got)
		_, err := r.Write(line)
		require.NoError(t, err)
		_, err = r.Write([]byte("\r\n"))
		require.NoError(t, err)
		if errors.Is(r.err, errNoReply) {
			n, err := r.ReadFrom(bytes.NewReader(append(value, '\r', '\n')))
			require.True(t, err != nil || n == int64(len(value)+2))
		}
		if r.err == nil {
			require.Equal(t, appendValue(nil, it)[:headerSize], value[:headerSize])
			require.Equal(t, value[headerSize:headerSize+15], bytes.Join(got.Spans, nil))
		}
	})
}

func textLog(w io.Writer) *slog.Logger { return slog.New(slog.NewTextHandler(w, nil)) }
