package main

import (
	"bytes"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"
)

// A flood of requests without keys leaves one line in a while, which counts them.
func TestStrangersAreToldOnceInAWhile(t *testing.T) {
	var log bytes.Buffer
	s := newStrangers()
	s.log = slog.New(slog.NewTextHandler(&log, nil))
	r := httptest.NewRequestWithContext(t.Context(), "GET", "/"+strings.Repeat("x", 1000), nil)
	r.RemoteAddr = "192.0.2.7:1"
	r.Header.Set("Authorization", "Bearer tried-key")
	now := time.Unix(1e9, 0)
	for range 1000 {
		s.came(r, now)
	}
	require.Equal(t, 1, strings.Count(log.String(), "\n"))
	require.Contains(t, log.String(), "level=WARN")
	require.Contains(t, log.String(), "requests=1 remote=192.0.2.7:1")
	require.Less(t, log.Len(), 400)
	s.came(r, now.Add(strangersPause))
	require.Contains(t, log.String(), "requests=1000 ")
	require.NotContains(t, log.String(), "tried-key")
	require.Equal(t, 1001.0, testutil.ToFloat64(s.refused))
}
