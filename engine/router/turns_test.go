package router

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func always(int) bool { return true }

func chat(messages ...string) fields {
	var list []json.RawMessage
	for i, m := range messages {
		role := [...]string{"user", "assistant"}[i%2]
		list = append(list, json.RawMessage(fmt.Sprintf(`{"role":%q,"content":%q}`, role, m)))
	}
	data, _ := json.Marshal(list)
	return fields{"messages": data}
}

// TestTurns: the next turn of a conversation finds the last one, once.
func TestTurns(t *testing.T) {
	long := strings.Repeat("words ", 30)
	for name, turns := range map[string][2]fields{
		"chat":         {chat("Hello, " + long), chat("Hello, "+long, "Hi.", "And now?")},
		"other spaces": {fields{"messages": json.RawMessage(`[{"role": "user", "content": "` + long + `"}]`)}, chat(long, "Hi.", "And?")},
		"text":         {fields{"prompt": json.RawMessage(`"` + long + `"`)}, fields{"prompt": json.RawMessage(`"` + long + ` and more"`)}},
		"one of one":   {fields{"prompt": json.RawMessage(`["` + long + `"]`)}, fields{"prompt": json.RawMessage(`"` + long + ` and more"`)}},
		"tokens":       {fields{"prompt": json.RawMessage("[" + strings.Repeat("17,", 40) + "1]")}, fields{"prompt": json.RawMessage("[" + strings.Repeat("17, ", 40) + "1, 2, 3]")}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTurns(2)
			marks := func(f fields) []uint64 { return r.marks(f.prompt()) }
			require.Nil(t, r.take(marks(turns[1]), always))
			r.keep(marks(turns[0]), 3, json.RawMessage("1"))
			require.Nil(t, r.take(marks(chat("Hello, "+strings.ToUpper(long))), always), "another conversation")
			other := turns[1]
			other["model"] = json.RawMessage(`"other"`)
			require.Nil(t, r.take(marks(other), always), "another model")
			delete(other, "model")
			require.JSONEq(t, "1", string(r.take(marks(turns[1]), always)))
			require.Nil(t, r.take(marks(turns[1]), always), "a ticket is good for one use")
			r.keep(marks(turns[0]), 3, json.RawMessage("1"))
			require.Nil(t, r.take(marks(turns[1]), func(i int) bool { return i != 3 }), "its instance is down")
		})
	}
}

// TestTurnsAreBounded: the oldest goes, and what is taken leaves no hole in the list.
func TestTurnsAreBounded(t *testing.T) {
	r := newTurns(8)
	rng := rand.New(rand.NewPCG(1, 2))
	var order []uint64
	for range 2000 {
		mark := rng.Uint64N(24)
		i := -1
		for at, m := range order {
			if m == mark {
				i = at
			}
		}
		if i >= 0 {
			order = append(order[:i:i], order[i+1:]...)
		}
		if rng.IntN(3) == 0 {
			got := r.take([]uint64{mark}, always)
			require.Equal(t, i >= 0, got != nil)
		} else {
			r.keep([]uint64{mark}, 0, json.RawMessage("{}"))
			if len(order) == 8 {
				order = order[1:]
			}
			order = append(order, mark)
		}
		require.Len(t, r.known, len(order))
		at := 0
		for x := r.order.Front(); x != nil; x = x.Next() {
			require.Same(t, x, r.known[order[at]])
			at++
		}
		require.Equal(t, len(order), at)
	}
	r.keep(nil, 0, json.RawMessage("{}"))
	require.Len(t, r.known, len(order), "a short prompt is no conversation")
}

func TestScanner(t *testing.T) {
	body := "data: {\"a\":1}\n\ndata: {\"kv_transfer_params\":null}\n\n" +
		"data: {\"choices\":[],\"kv_transfer_params\":{\"kvport_ticket\":\"x\"}}\n\ndata: [DONE]\n\n"
	for size := 1; size < len(body); size++ {
		var got []string
		s := scanner{found: func(event []byte) { got = append(got, string(event)) }}
		for at := 0; at < len(body); at += size {
			s.write([]byte(body[at:min(len(body), at+size)]))
		}
		require.Equal(t, []string{`{"choices":[],"kv_transfer_params":{"kvport_ticket":"x"}}`}, got)
	}
}

// held answers as a decode instance that holds its answer, streaming if asked to.
func held(name string, stream bool) http.HandlerFunc {
	params := fmt.Sprintf(`{"id":"d","kv_transfer_params":{"do_remote_prefill":false,"do_remote_decode":true,"kvport_ticket":%q}}`, name)
	return func(w http.ResponseWriter, _ *http.Request) {
		if !stream {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, params)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: {\"n\":1}\n\ndata: %s\n\ndata: [DONE]\n\n", params)
	}
}

// TestNextTurn: the prefill instance of the second turn is told where the first answer is held, once; and the
// decode instances are asked to hold theirs.
func TestNextTurn(t *testing.T) {
	for _, stream := range []bool{false, true} {
		p := serveInstance(t, ticket("of P"))
		d := serveInstance(t, held("of D", stream))
		f := serveRouter(t, Config{Prefill: []string{p.URL}, Decode: []string{d.URL}, Turns: 10})
		long := strings.Repeat("long ", 20)
		for _, body := range []fields{chat(long), chat(long, "answer", "next"), chat(long, "answer", "next")} {
			resp, err := f.Client().Post(f.URL+"/v1/chat/completions", "application/json", strings.NewReader(string(body.encode())))
			require.NoError(t, err)
			require.Equal(t, 200, resp.StatusCode)
			_, err = io.Copy(io.Discard, resp.Body)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
		}
		params := func(s seen) (p struct {
			Prefill bool    `json:"do_remote_prefill"`
			Decode  bool    `json:"do_remote_decode"`
			Ticket  string  `json:"kvport_ticket"`
			Blocks  [][]int `json:"remote_block_ids"`
		},
		) {
			require.NoError(t, json.Unmarshal(s.body["kv_transfer_params"], &p))
			return p
		}
		ps, ds := p.requests(), d.requests()
		require.Len(t, ps, 3)
		require.Len(t, ds, 3)
		require.Empty(t, params(ps[0]).Ticket)
		require.Equal(t, "of D", params(ps[1]).Ticket)
		require.True(t, params(ps[1]).Decode)
		require.False(t, params(ps[1]).Prefill)
		require.Equal(t, "of D", params(ps[2]).Ticket, "the second turn's own answer")
		for _, s := range ds {
			got := params(s)
			require.True(t, got.Decode && got.Prefill)
			require.Equal(t, "of P", got.Ticket)
			require.Equal(t, [][]int{{1, 2}}, got.Blocks, "all else is passed on")
		}
	}
}

// TestNoTurns: without conversations to remember nothing is asked for and nothing told.
func TestNoTurns(t *testing.T) {
	p := serveInstance(t, ticket("of P"))
	d := serveInstance(t, held("of D", false))
	f := serveRouter(t, Config{Prefill: []string{p.URL}, Decode: []string{d.URL}})
	long := strings.Repeat("long ", 20)
	for _, body := range []fields{chat(long), chat(long, "answer", "next")} {
		resp, err := f.Client().Post(f.URL+"/v1/chat/completions", "application/json", strings.NewReader(string(body.encode())))
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
	}
	for _, s := range p.requests() {
		require.NotContains(t, string(s.body["kv_transfer_params"]), "ticket")
	}
	for _, s := range d.requests() {
		require.NotContains(t, string(s.body["kv_transfer_params"]), "do_remote_decode")
	}
}
