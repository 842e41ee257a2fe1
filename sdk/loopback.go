package sdk

import (
	"context"
	"errors"
	"log/slog"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
)

// Loopback serves p in this process, on a connection in memory, so that a connector can be tested through
// the protocol. The caller gives the connection to host.Connect. stop ends the connection and waits until
// every session has closed its side. A nil log drops everything.
func Loopback(p connector.Plugin, log *slog.Logger) (conn *grpc.ClientConn, stop func() error, err error) {
	listener := bufconn.Listen(1 << 20)
	server := NewServer(p, log)
	g := grpc.NewServer(wire.ServerOptions()...)
	kvportv1.RegisterPluginServer(g, server)
	served := make(chan error, 1)
	go func() { served <- g.Serve(listener) }()
	options := append(wire.DialOptions(),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	conn, err = grpc.NewClient("passthrough:///loopback", options...)
	if err != nil {
		g.Stop()
		return nil, nil, errors.Join(err, <-served)
	}
	return conn, func() error {
		err := conn.Close()
		ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
		defer cancel()
		err = errors.Join(err, server.Stop(ctx))
		g.Stop()
		return errors.Join(err, <-served)
	}, nil
}
