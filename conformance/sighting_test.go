package conformance

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/docs"
	"github.com/kvport/kvport/host"
)

// A server that has died is no fault of the connector in any case after that. What is skipped anyway is skipped without a harness, whose server
// would be mended first. Cases run again when the server is back.
func TestServerThatDied(t *testing.T) {
	server, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := server.Addr().String()
	newHarness := InProcess(connector.Plugin{}, json.RawMessage(`{"url": "@PROXY:`+address+`@"}`))
	made := 0
	counted := func() (Harness, error) {
		made++
		return newHarness()
	}
	s := settings{deadline: time.Minute, seen: new(sighting), info: &connector.Info{}}
	warmUp()
	accuse := func(c T, _ Harness) { c.Errorf("the connector lost a value") }

	r := checkCase(t.Context(), Case{ID: "kills", Run: func(T, Harness) { require.NoError(t, server.Close()) }}, counted, s)
	require.Equal(t, Pass, r.Status, r.Log)
	for n, id := range []string{"first", "second"} {
		r = checkCase(t.Context(), Case{ID: id, Run: accuse}, counted, s)
		require.Equal(t, Inconclusive, r.Status)
		require.Equal(t, []string{"no server is at " + address + " since case kills"}, r.Log)
		require.Equal(t, n == 0, r.noticed)
	}
	require.Equal(t, 3, made)
	r = checkCase(t.Context(), Case{ID: "holds", Needs: connector.CanHold, Run: accuse}, counted, s)
	require.Equal(t, Skip, r.Status)
	require.Equal(t, []string{fmt.Sprintf("the connector does not offer %v", connector.CanHold)}, r.Log)
	require.Equal(t, 3, made)

	server, err = new(net.ListenConfig).Listen(t.Context(), "tcp", address)
	require.NoError(t, err)
	defer func() { require.NoError(t, server.Close()) }()
	r = checkCase(t.Context(), Case{ID: "first", Run: accuse}, counted, s)
	require.Equal(t, Fail, r.Status)
	require.Empty(t, r.away)
}

// The text says once what was away and what nobody had asked for, and why a process died. JSON has a line for each case.
func TestTextSaysItOnce(t *testing.T) {
	const away = "no server is at localhost:9 since case kills"
	results := []Result{
		{ID: "first", Rule: "REMOTE-03", Text: "One.", Status: Inconclusive, Log: []string{away}, away: away, noticed: true, Again: true},
		{ID: "second", Rule: "REMOTE-04", Text: "Two.", Status: Inconclusive, Log: []string{away}, away: away, Again: true},
		{ID: "holds", Rule: "HOLD-01", Text: "Three.", Status: Skip, Log: []string{notOffered + "hold"}, unasked: true},
		{ID: "waits", Rule: "HOLD-02", Text: "Four.", Status: Skip, Log: []string{notOffered + "hold"}, unasked: true},
		{ID: "grouped", Rule: "LAYOUT-01", Text: "Five.", Status: Skip, Log: []string{notOffered + "groups"}, unasked: true},
	}
	var b bytes.Buffer
	require.NoError(t, WriteText(&b, results))
	require.Equal(t, `inconclusive  REMOTE-03   first                 One.
      `+away+`
      it will run again when the other cases have ended
Not asked for, and not offered by the connector: hold, groups (3 cases)
These did not run, since `+away+`, which says nothing of the connector: first, second
0 passed, 0 failed, 3 skipped, 2 inconclusive
`, b.String())
	b.Reset()
	require.NoError(t, WriteJSON(&b, results))
	require.Equal(t, len(results), bytes.Count(b.Bytes(), []byte("\n")))
}

// The summary of a process that died has the line that says why, and names all mistakes by which files that were hurt end or hang one.
func TestSummaryOfADeath(t *testing.T) {
	var b bytes.Buffer
	require.NoError(t, WriteSummary(&b, []Result{{
		ID: "truncated", Rule: "FAULT-06", Text: "Files are cut.", Status: Fail, Log: []string{"save: the connection to the plugin is gone"},
		LastWords: []string{
			"the plugin's process 7 ended by itself: exit status 2; the last lines of its standard error:",
			"  opened", "  fatal error: fault", "  [signal SIGBUS: bus error]",
		},
	}}))
	require.Contains(t, b.String(), "        died:     the plugin's process 7 ended by itself: exit status 2: fatal error: fault\n")
	require.Contains(t, b.String(), "look at:")
	require.Len(t, docs.Mistakes("FAULT-06"), 2)
	for _, mistake := range docs.Mistakes("FAULT-06") {
		require.Contains(t, b.String(), mistake)
	}
	require.Equal(t, "it ended: (none)", death([]string{"it ended; the last lines of its standard error:", "  (none)"}))
}

// A plugin that the machine kept from its handshake is not accused, and nobody reads about a setting that a run does not have.
func TestLateStart(t *testing.T) {
	started := func(waited time.Duration) Result {
		late := &host.LateError{Limit: 5 * time.Second, Waited: waited, Err: errors.New("raise kvport.deadlines.handshake")}
		return run(t, time.Minute, func(c T, h Harness) { newRig(c, h).must(lateStart(late), "start") })
	}
	r := started(24 * time.Second)
	require.Equal(t, Inconclusive, r.Status)
	require.Contains(t, r.Log[0], "start: no handshake within 5s, it was killed after 24s; the machine was busy")
	r = started(5100 * time.Millisecond)
	require.Equal(t, Fail, r.Status)
	require.Equal(t, []string{"start: no handshake within 5s, it was killed after 5.1s"}, r.Log)
	other := errors.New("no room")
	require.Equal(t, other, lateStart(other))
}
