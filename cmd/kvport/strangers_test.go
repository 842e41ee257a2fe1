package main

import (
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/apikeys"
	"github.com/kvport/kvport/verify/testkit"
)

// A flood of requests without keys leaves one line in a while, which counts them, the last of them too.
func TestStrangersAreToldOnceInAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Log
		s := newStrangers()
		s.log = slog.New(slog.NewTextHandler(&log, nil))
		r := httptest.NewRequestWithContext(t.Context(), "GET", "/"+strings.Repeat("x", 1000), nil)
		r.RemoteAddr = "192.0.2.7:1"
		r.Header.Set("Authorization", "Bearer tried-key")
		for range 1000 {
			s.came(r)
		}
		require.Equal(t, 1, strings.Count(log.String(), "\n"))
		require.Contains(t, log.String(), "level=WARN")
		require.Contains(t, log.String(), "requests=1 remote=192.0.2.7:1")
		require.Less(t, len(log.String()), 400)
		<-time.After(apikeys.LogInterval)
		synctest.Wait()
		require.Contains(t, log.String(), "requests=999 ", "though nobody came")
		<-time.After(10 * apikeys.LogInterval)
		require.Equal(t, 2, strings.Count(log.String(), "\n"))
		s.came(r)
		require.Equal(t, 3, strings.Count(log.String(), "\n"))
		require.NotContains(t, log.String(), "tried-key")
		require.Equal(t, 1001.0, testutil.ToFloat64(s.refused))
	})
}
